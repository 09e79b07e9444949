"""How a module of somebody's own is imported: compiled from what its file says now, and so is what lies beside it.

Python takes a compiled file for current where time, in whole seconds, and size are the source's. A kernel, or a module
that it imports, that is edited twice in a second (by a script, by a fast loop) would be judged as it was before.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

# Folders of packages that somebody installed: nobody edits them twice in a second, and there are many.
INSTALLED = ("site-packages", "dist-packages")


def import_user_module(name: str) -> ModuleType:
    """Import a module by its name, as ``python -m`` finds it, or a file by its path, as ``python file.py`` does.

    Raises whatever the file raises while it is loaded.
    """
    if not name.endswith(".py"):
        _import_from_source(Path.cwd())
        return import_module(name)
    path = Path(name)
    _import_from_source(path.parent)
    loader = FromSource(f"{path.stem}_under_attncheck", str(path))
    spec = spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None, "a path with a loader has a specification"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    loader.exec_module(module)
    return module


class FromSource(SourceFileLoader):
    """Loads what a file says now."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of a module, compiled from its text."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_from_source(folder: Path) -> None:
    """Let imports find what lies in a folder and below, compiled from its text."""
    sys.path.insert(0, str(folder))
    top = folder.resolve()
    sys.path_hooks.insert(0, lambda path: _finder_of(path, top))
    for path in [each for each in list(sys.path_importer_cache) if _is_users(each, top)]:
        del sys.path_importer_cache[path]


def _finder_of(path: str, top: Path) -> FileFinder:
    """Return what finds modules in a folder of the user's. Raises ``ImportError`` for any other, as hooks have to."""
    if not _is_users(path, top):
        raise ImportError(f"{path} is none of the user's folders", path=path)
    return FileFinder(
        path,
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (FromSource, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )


def _is_users(path: str, top: Path) -> bool:
    """Return whether a path is a folder below the top, and neither of an installed package nor of this one."""
    folder = Path(path).resolve()
    is_below = folder.is_relative_to(top) and folder.is_dir()
    is_own = any(folder.is_relative_to(each) for each in _own_folders())
    return is_below and not is_own and not {*INSTALLED} & {*folder.parts}


@cache
def _own_folders() -> frozenset[Path]:
    """Return where this package's code lies, which in a checkout is in several places."""
    root = __name__.partition(".")[0]
    own = [module for name, module in sys.modules.items() if name.partition(".")[0] == root]
    return frozenset(Path(folder).resolve() for module in own for folder in getattr(module, "__path__", ()))
