"""Paths that callers gave, as absolute ones that the system can take; URLs; partitions of a split (spec 2.4).

A split that several machines make has a file for each: they share no locks, so each writes its own
`NAME-00003-of-00016.zarr.zip`. The pattern `NAME-*-of-00016.zarr.zip` opens them together; `ups-store concat`
makes one file of them.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PosixPath
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from ups_store.errors import SpecError, StoreNotFoundError

MAX_NAME_BYTES = 255  # NAME_MAX of Linux file systems
MANIFEST_SUFFIX = ".zarr.json"  # of what named the parts of a set, in earlier versions
_MAX_PATH_BYTES = 4095  # PATH_MAX without the NUL behind it
_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>(\.packed)?\.zarr\.zip)")
SCHEMES = ("s3", "gs", "az", "https", "http")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+")  # two letters at least: "c:/" is none; "cache::s3" is one
# Two letters at least here, too; `:http:` and `name,option=value:` are what rclone takes.
_RCLONE = re.compile(r":?[\w.+@-][\w.+@ -]+(?:,[^:/]+)?:(?P<rest>.*)")


def path_of(path: str | os.PathLike[str], *, suffix_nbytes: int = 0) -> Path:
    """Return the absolute path, checked before the system sees it; `SpecError` of kind "path" or "url".

    With `suffix_nbytes` it must end in a name, to which so many bytes are going to be appended.
    """
    text: object = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        hint = "give text, such as os.fsdecode(path)" if isinstance(text, bytes) else None
        type_name = type(text).__name__
        raise SpecError("path", kind="path", expected="a str or os.PathLike[str]", found=type_name, hint=hint)
    if "\0" in text:
        hint = "check how the path was made"
        raise SpecError("path holds a NUL character", kind="path", path=repr(text), hint=hint)
    check_local(text)
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        hint = "give what os.fsdecode makes of the name's bytes"
        raise SpecError("path can't be encoded", kind="path", path=text, found=error, hint=hint) from error
    absolute = Path(text).absolute()
    if suffix_nbytes and not absolute.name:
        raise SpecError("path", kind="path", expected="one that ends in a name", found=repr(text))
    for title, names, most in (
        ("file name", [absolute.name], MAX_NAME_BYTES - suffix_nbytes),
        ("folder name", absolute.parts, MAX_NAME_BYTES),
        ("path", [str(absolute)], _MAX_PATH_BYTES - suffix_nbytes),
    ):
        if (nbytes := max(len(os.fsencode(name)) for name in names)) > most:
            raise SpecError(
                f"{title} too long",
                kind="path",
                path=absolute,
                expected=f"at most {most} bytes",
                found=nbytes,
                hint="choose a shorter one",
            )
    return absolute


@dataclass(frozen=True)
class Partition:
    """What the name of a partition says."""

    whole: str  # name of the store, NAME.zarr.zip
    number: int
    count: int


def partition_of(name: str) -> Partition | None:
    """Parse the name of a file, if it is one of a partition."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Partition(match["stem"] + match["suffix"], int(match["number"]), int(match["count"]))


def partition_path(path: Path, number: int, count: int) -> Path:
    """Return the name of one partition of the store at `path`, `NAME.zarr.zip`."""
    stem = path.name.removesuffix(".zarr.zip")
    return path.with_name(f"{stem}-{number:05d}-of-{count:05d}.zarr.zip")


def partitions_pattern(path: Path, count: int) -> Path:
    """Return the pattern of all partitions of the store at `path`, `NAME.zarr.zip`, in `count` files."""
    stem = path.name.removesuffix(".zarr.zip")
    return path.with_name(f"{stem}-*-of-{count:05d}.zarr.zip")


def partition_counts(path: Path) -> list[int]:
    """Return in how many files the store at `path` is by names beside it, complete or not; sorted."""
    stem = glob.escape(path.name.removesuffix(".zarr.zip"))
    names = (file.name.removesuffix(".building") for file in path.parent.glob(f"{stem}-*-of-*.zarr.zip*"))
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    return sorted({int(m["count"]) for m in matches if m["stem"] + m["suffix"] == path.name})


def partition_range(num_samples: int, number: int, count: int) -> range:
    """Return the samples of one partition: consecutive; sizes of partitions differ by one at most."""
    return range(num_samples * number // count, num_samples * (number + 1) // count)


def is_pattern(path: Path) -> bool:
    """Return whether a path names several files: by a star, unless that is a file's own."""
    return "*" in path.name and not os.path.lexists(path)


def check_one_file(path: Path) -> None:
    """Refuse a pattern where one file is meant, `SpecError` of kind "partitions"; and a manifest."""
    check_no_manifest(path)
    if is_pattern(path):
        hint = "name one of them, or make one file of them with `ups-store concat`"
        raise SpecError("it names several files", kind="partitions", path=path, expected="one", hint=hint)


def check_store_name(path: Path) -> None:
    """Refuse to write a store under a name by which `open` would take it for a manifest; kind "path"."""
    if path.name.endswith(MANIFEST_SUFFIX):
        hint = "choose a name that ends in .zarr.zip; `append` writes stores that grow"
        raise SpecError("path", kind="path", path=path, expected="the name of a store", hint=hint)


def check_no_manifest(path: Path) -> None:
    """Refuse the manifest of a set of an earlier version; `SpecError` of kind "set"."""
    if path.name.endswith(MANIFEST_SUFFIX):
        name = path.name.removesuffix(MANIFEST_SUFFIX)
        raise SpecError(
            "a set of parts, by an earlier version of ups-store",
            kind="set",
            path=path,
            hint=f"rename each part {name}.parts/KKKKK.zarr.zip to {name}-KKKKK.zarr.zip and open "
            f"{name}-*.zarr.zip, to which `ups_store.append` adds; or make one store of them with "
            f"`ups-store concat {name}.parts/*.zarr.zip {name}.zarr.zip`",
        )


def numbered_paths(pattern: Path) -> dict[int, Path]:
    """Return the files that a pattern such as `days-*.zarr.zip` names, by number (five digits)."""
    before, _, after = pattern.name.partition("*")
    named = re.compile(rf"{re.escape(before)}(\d{{5}}){re.escape(after)}")
    names = sorted(os.listdir(pattern.parent)) if pattern.parent.is_dir() else []
    names = [name for name in names if not _NAME.fullmatch(name)]  # partitions are no numbers
    return {int(match[1]): pattern.with_name(match[0]) for match in filter(None, map(named.fullmatch, names))}


def find_partitions(pattern: Path) -> list[Path]:
    """Return the files that a pattern such as `NAME-*-of-00016.zarr.zip` names, in order, all of them."""
    named, missing = named_partitions(pattern)
    if missing:
        raise StoreNotFoundError(
            f"{len(missing)} of {len(named)} partitions are missing, the first of them {missing[0].name}",
            path=pattern,
            hint="run the build again on the machine that makes it, or copy it here",
        )
    return named


def named_partitions(pattern: Path) -> tuple[list[Path], list[Path]]:
    """Return the partitions that a pattern names, in order, and those of them that are missing.

    `SpecError` if the pattern matches other files, or partitions of several stores.
    """
    if numbered := [*numbered_paths(pattern).values()]:
        return numbered, []
    names = glob.escape(pattern.name).replace("[*]", "*")  # a star is all that means something, in the name
    matches = {path: _NAME.fullmatch(path.name) for path in pattern.parent.glob(names)}
    if not matches:
        raise StoreNotFoundError("no file matches", path=pattern, hint="check the path, or build it")
    stores = {(match["stem"], int(match["count"]), match["suffix"]) for match in matches.values() if match}
    if len(stores) != 1 or None in matches.values():
        raise SpecError(
            "the files are not the partitions of one store",
            path=pattern,
            kind="partitions",
            expected="NAME-00000-of-00016.zarr.zip and so on, of one NAME",
            found=", ".join(sorted(path.name for path in matches)[:4]),
        )
    ((stem, count, suffix),) = stores
    named = [pattern.with_name(f"{stem}-{number:05d}-of-{count:05d}{suffix}") for number in range(count)]
    return named, [path for path in named if path not in matches]


def url_of(path: str | os.PathLike[str]) -> str | None:
    """Give the URL that a path is, also where `pathlib` has made "s3:/bucket/a" of it; None if it is none."""
    text = os.fspath(path)
    scheme, colon, rest = text.partition(":/")
    if not colon or not _SCHEME.fullmatch(scheme):
        return None
    if not rest.startswith("/") and os.path.lexists(f"{scheme}:"):  # a folder of that name is meant
        return None
    slashes = "///" if scheme.lower() == "file" else "//"
    return f"{scheme}:{slashes}{rest.lstrip('/')}"


def is_remote(path: object) -> bool:
    """Say whether a path is a URL of what isn't a file of this machine."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        return False
    url = url_of(path)
    return url is not None and not url.lower().startswith("file:")


def shown_url(path: str | os.PathLike[str]) -> str:
    """Give a URL without user, password, query and fragment, which may hold keys."""
    parts = urlsplit(url_of(path) or os.fspath(path))
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def check_local(path: str | os.PathLike[str]) -> None:
    """Refuse a URL, of which `pathlib` would make a name here: "s3:/bucket/a" of "s3://bucket/a".

    Also one of "file://", whose path can be given itself.
    """
    url = url_of(path)
    if url is None:
        return
    is_file = url.lower().startswith("file:")
    hint = "copy the file here; stores can be read where they are, with `pip install 'ups-store[s3]'`"
    raise SpecError(
        "this is a URL",
        kind="url",
        path=url,
        expected="a path on this machine",
        hint=f"say /{url.partition(':///')[2]}" if is_file else hint,
    )


def instead_of_rclone(text: str, *, folder: str | os.PathLike[str] = "") -> str | None:
    """Say what to write instead of an rclone remote, `b2:BUCKET/FOLDER`; None if the text is none.

    A file that is there in the folder is meant, whatever its name looks like.
    """
    match = _RCLONE.fullmatch(text)
    if match is None or match["rest"].startswith("//"):
        return None
    if any(os.path.lexists(os.path.join(folder, name)) for name in (text, text.partition("/")[0])):
        return None
    bucket = match["rest"].strip("/") or "BUCKET/FOLDER"
    return f"say s3://{bucket}, and where that is by AWS_ENDPOINT_URL, as https://s3.REGION.backblazeb2.com"


class UrlPath(PosixPath):
    """A URL as the path of a store: names and suffixes as of any path, and `str` gives the URL again."""

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}"

    def __fspath__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Url:
    """The URL of an object, or of a folder of them."""

    text: str  # as it was given; of https it may hold a password or a signature

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Url:
        """Parse the URL of an object, else `SpecError` of kind "url"."""
        text = url_of(path)
        expected = "s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY or https://HOST/PATH"
        if text is None:
            raise SpecError("no URL", kind="url", path=os.fspath(path), expected=expected)
        url = cls(text)
        if url.scheme not in SCHEMES or not url._parts.netloc or not url.key.strip("/"):
            raise SpecError("URL of a store", kind="url", path=shown_url(text), expected=expected)
        return url

    def __repr__(self) -> str:
        return f"Url({shown_url(self.text)!r})"

    @cached_property
    def _parts(self) -> SplitResult:
        return urlsplit(self.text)

    @property
    def scheme(self) -> str:
        """One of `SCHEMES`, where it was checked."""
        return self._parts.scheme

    @property
    def bucket(self) -> str:
        """Bucket or container; of https all but the path: the query is the same for every object."""
        if not self.is_http:
            return self._parts.netloc
        return urlunsplit((self.scheme, self._parts.netloc, "", self._parts.query, ""))

    @property
    def key(self) -> str:
        """Name of the object in its bucket."""
        return unquote(self._parts.path).lstrip("/")

    @property
    def is_http(self) -> bool:
        """Return whether it is a file of a web server."""
        return self.scheme in ("https", "http")

    @property
    def path(self) -> UrlPath:
        """The same for messages and names, without what is secret."""
        return UrlPath(shown_url(self.text))

    def below(self, name: str) -> Url:
        """The object of a name, which may have slashes, in this folder."""
        return self._at(f"{self._parts.path.rstrip('/')}/{quote(name)}")

    def beside(self, *names: str) -> Url:
        """The object of another name, or of a name in a folder, beside this one."""
        return self._at("/".join((self._parts.path.rpartition("/")[0], *names)))

    def _at(self, path: str) -> Url:
        return Url(urlunsplit(self._parts._replace(path=path)))
