"""Packs a run folder into one file: all of it, or what may be published."""

import contextlib
import os
import pathlib
import tarfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from fedjax_dp.core import checks, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.experiment.running.release import MAY_BE_PUBLISHED, marks_now, publishable_files
from fedjax_dp.experiment.running.run_folder import (
    CONFIG_FILE,
    LOCK_FILE,
    RELEASE_FOLDER,
    ended_summary,
    locked,
    require_run,
)
from fedjax_dp.io.digests import read_sealed, reporting_full_disk, require_undamaged_files
from fedjax_dp.io.logbook import read_metrics
from fedjax_dp.io.statement import MARK_WORDS

_ENDING = ".tar"
# The first second of 1980, since some programs warn of earlier times.
_TIME = 315_532_800
_UNMARKED = "no mark of the run says that it may be published"
_IN_RELEASE = f"the folder {RELEASE_FOLDER}, which is packed, has what may be published of it"


class Packed(NamedTuple):
    """A run in one file.

    Attributes:
      file: the archive.
      sha256: its SHA-256, in hexadecimal digits.
      files: the files in it, by their paths in the folder that was packed.
      left_out: why each of the other files and folders of the run is not in it, by name.
    """

    file: pathlib.Path
    sha256: str
    files: tuple[str, ...]
    left_out: Mapping[str, str]


@checked
def pack(
    folder: str | pathlib.Path, output: str | pathlib.Path | None = None, *, release: bool = False
) -> Packed:
    """Packs a run folder into a tar file, whole or only what may be published.

    The same files give the same bytes on every machine: they are sorted, and their times, owners
    and permissions are left out. Those of the whole folder are for their owner alone, as the root
    of the noise is among them.

    Guarantee: with `release` the archive holds the files that the marks of the run let pass, and
    neither the name of the run folder nor links.

    Args:
      folder: a run folder, or the folder `release` in one.
      output: the new archive, which ends in ".tar" and is outside of the folder; None for the name
        of the folder, with "-release" if only that is packed, beside it.
      release: whether to pack only what may be published: the folder `release` if the run has one,
        else the files of the run folder that are marked as public or covered.

    Returns:
      What was packed, and what was left out and why.

    Raises:
      ValueError: if the folder holds no run or is in use, a file in it is damaged, a link leads out
        of it, nothing may be published, or the output is there already.
    """
    place = files.expanded(folder)
    require_run(place)
    place = place.resolve()
    suffix = f"-{RELEASE_FOLDER}{_ENDING}" if release else _ENDING
    into = place.with_name(f"{place.name}{suffix}") if output is None else pathlib.Path(output)
    files.require_new(into, "output", (_ENDING,))
    is_outside = not into.resolve().is_relative_to(place)
    checks.require(is_outside, "output", "be outside of the run folder", str(into))
    with _unused(place), reporting_full_disk("no archive was written: free some space"):
        left_out: dict[str, str] = {}
        source, names = place, None
        if release:
            source, names, left_out = _publishable(place)
        require_undamaged_files(source, names)
        entries = _entries(source, names, has_links=not release)
        into.parent.mkdir(parents=True, exist_ok=True)
        # A released archive does not name the run folder.
        _write(into, entries, RELEASE_FOLDER if release else place.name, is_public=release)
    packed = tuple(name for name, path in entries.items() if not path.is_dir())
    return Packed(into, files.digest_of_file(into), packed, left_out)


@contextlib.contextmanager
def _unused(folder: pathlib.Path) -> Iterator[None]:
    """Requires that no run is in progress in a folder, and starts in it meanwhile."""
    lock = folder / LOCK_FILE
    if lock.is_file() and os.access(lock, os.W_OK):
        with locked(folder):
            yield
    else:
        # A copy, or a folder that can only be read.
        yield


def _publishable(
    folder: pathlib.Path,
) -> tuple[pathlib.Path, frozenset[str], dict[str, str]]:
    """Returns the folder of what may be published, the names in it, and why others stay out."""
    left_out: dict[str, str] = {}
    source, at, marks = folder, "", dict[str, str](publishable_files(folder))
    is_release = bool(marks)
    if not is_release:
        tables = files.parse_toml(read_sealed(folder, CONFIG_FILE), folder / CONFIG_FILE)
        marks |= marks_now(folder, tables)
        marks.pop(RELEASE_FOLDER, None)
        if released := publishable_files(folder / RELEASE_FOLDER):
            others = [name for name in _names(folder) if name != RELEASE_FOLDER]
            left_out = {name: _why(marks.get(name), _IN_RELEASE) for name in others}
            source, at, marks = folder / RELEASE_FOLDER, f"{RELEASE_FOLDER}/", released
            is_release = True
        else:
            rows = read_metrics(folder, lambda text: None)
            rule = "be a run that has ended since it was started or resumed, to be published"
            checks.require(bool(ended_summary(folder, rows)), "folder", rule, str(folder))
    # Without its digests a release may have been changed.
    lacking = sorted(set(marks) - set(_names(source))) if is_release else []
    rule = "have the files that its statement lists, to be published"
    checks.require(not lacking, str(source), rule, f"none of {', '.join(lacking)}")
    kept = {name for name in _names(source) if marks.get(name) in MAY_BE_PUBLISHED}
    others = [name for name in _names(source) if name not in kept]
    left_out |= {at + name: _why(marks.get(name), _UNMARKED) for name in others}
    checks.require(bool(kept), "folder", "have files that may be published", sorted(left_out))
    return source, frozenset(kept), left_out


def _names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK_FILE)


def _why(mark: str | None, otherwise: str) -> str:
    """Says why a file stays out: by its mark if that forbids to publish it."""
    may_not = mark is not None and mark not in MAY_BE_PUBLISHED
    return MARK_WORDS[str(mark)].removeprefix("no: ") if may_not else otherwise


def _entries(
    folder: pathlib.Path, names: frozenset[str] | None, *, has_links: bool
) -> dict[str, pathlib.Path]:
    """Lists files and folders below a folder, sorted by their paths in it; checks each."""

    def fail(error: OSError) -> NoReturn:
        raise error

    found: dict[str, pathlib.Path] = {}
    for place, folders, own in os.walk(folder, onerror=fail):
        for path in (pathlib.Path(place) / name for name in (*folders, *own)):
            name = path.relative_to(folder).as_posix()
            is_asked = name != LOCK_FILE if names is None else name.partition("/")[0] in names
            if is_asked:
                found[name] = path
    rule = "be a file, a folder" + " or a link to a file of the run folder" * has_links
    for path in found.values():
        kind, is_link = files.kind_of(path, str(path)), path.is_symlink()
        is_own = has_links and kind == "file" and path.resolve().is_relative_to(folder)
        fits = is_own if is_link else kind in ("file", "folder")
        checks.require(fits, str(path), rule, f"a link to {path.readlink()}" if is_link else kind)
    return dict(sorted(found.items()))


def _write(
    output: pathlib.Path, entries: Mapping[str, pathlib.Path], top: str, *, is_public: bool
) -> None:
    """Writes an archive, which appears whole; unless it is public, for its owner alone."""
    unfinished = output.with_name(f"{output.name}.tmp")
    mode = 0o644 if is_public else 0o600
    number = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | files.BINARY, mode)
    try:
        with (
            os.fdopen(number, "wb") as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, path in entries.items():
                member = tarfile.TarInfo(f"{top}/{name}")
                member.mtime, member.mode = _TIME, mode
                if path.is_dir():
                    member.type, member.mode = tarfile.DIRTYPE, mode | 0o100 | 0o011 * is_public
                    archive.addfile(member)
                    continue
                with path.open("rb") as content:
                    member.size = os.fstat(content.fileno()).st_size
                    archive.addfile(member, content)
        unfinished.replace(output)
    except BaseException:
        unfinished.unlink()
        raise
