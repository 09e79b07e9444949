"""A page per published document, as data that every kind of report lays out."""
