"""The bundled corpus: YAML only, one folder or file per topic, ``documents`` with one file per published document."""
