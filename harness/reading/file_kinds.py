"""Arrays that lie in files beside a case file, as a kind of array. ``stored_arrays.py`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, computed_field

from attncheck.reading.array_fields import Arrangement, Strict
from attncheck.spec import Shape

FOLDER = "folder"
"""What a validator's context tells of the case file: the folder that it is in."""


@dataclass(frozen=True)
class Contents:
    """What is known of a stored array without holding it.

    ``numbers`` are all of them in row order, where they are few and whole, as counts are: ``is_all``. Otherwise they
    stand for all: the least and the largest finite one, NaN and infinities that are there, and one that is not whole.
    """

    digest: str
    shape: Shape
    numbers: tuple[float, ...]
    is_all: bool


class StoredNumbers(Strict):
    """Numbers in a file beside the case file, taken as they are: what a document gives to the last bit."""

    file: Annotated[str, Field(min_length=1, max_length=1000)] = Field(
        description="The path of the file, relative to the folder of the case file and inside of it."
    )
    name: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        default=None, description="The name of the array in the file; .npy holds one without a name."
    )
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        default=None, description="The SHA-256 checksum of the file, which it then has to have."
    )
    _folder: str = PrivateAttr(default="")
    _contents: Contents | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Remember the folder of the case file."""
        self._folder = str((context or {}).get(FOLDER, ""))

    @property
    def folder(self) -> str:
        """The folder that the path is relative to; empty where the array is in no file of cases."""
        return self._folder

    @property
    def contents(self) -> Contents | None:
        """What the file held when the case was read; None before."""
        return self._contents

    def pin(self, contents: Contents) -> None:
        """Say what the file holds: another content is refused from then on."""
        self._contents = contents

    @computed_field(description="What the case is judged by, whatever its file is called.")  # type: ignore[prop-decorator]
    @property
    def content(self) -> str:
        """The digest of the numbers, which is part of the digest of a case."""
        return self._contents.digest if self._contents else ""


class StoredArray(StoredNumbers, Arrangement):
    """An array in a file beside the case file: .npy, .npz or .safetensors. Nothing is unpickled."""
