"""`torch-grad-exporter run train.py`: trains with an exporter of which the script knows nothing."""

from __future__ import annotations

import argparse
import atexit
import functools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_grad_exporter.cli import script
from torch_grad_exporter.cli.arguments import option_help
from torch_grad_exporter.config.option import Option, from_command_line, options_of, resolve
from torch_grad_exporter.config.settings import Arguments, Settings
from torch_grad_exporter.errors import say
from torch_grad_exporter.integrations.attach import Attachment
from torch_grad_exporter.outputs.otlp import push_settings

if TYPE_CHECKING:
    from torch_grad_exporter.exporter import Exporter

PROGRAM = "torch-grad-exporter run"

USAGE = "%(prog)s [OPTION ...] SCRIPT [ARGUMENT ...]\n       %(prog)s [OPTION ...] -m MODULE [ARGUMENT ...]"

OFFERED = tuple(one for one in (*options_of(Settings), *options_of(Arguments)) if one.is_text)
"""Options of `start_exporter` that a text can stand for."""

_VALUES = ("on", "off", "true", "false", "always")

_NAMES = {f"--{one.name.replace('_', '-')}": one for one in OFFERED}


@dataclass(frozen=True)
class Options:
    """What was chosen. `options`: those of `start_exporter`. `save`: where the history goes, `None` for nowhere."""

    target: script.Target
    options: Mapping[str, Any]
    save: Path | None = None


def main(arguments: Sequence[str]) -> int:
    """Runs a script with these arguments of the command; raises what the script raises. Wrong arguments exit with 2."""
    options = parse(arguments)
    try:
        script.check(options.target)
    except script.ScriptError as error:
        switch = "; a switch takes its value behind an equals sign, as in --weights=on" if options.target.name in _VALUES else ""
        print(f"{PROGRAM}: error: {error}{switch}", file=sys.stderr)
        return 2
    if options.save is not None:
        options.save.unlink(missing_ok=True)  # else a run of which nothing is known would be judged by an earlier one's file
    watch = ScriptExporter(options)
    script.run(options.target, watch.ended)
    return 0


class ScriptExporter:
    """The exporter of a script, from before its first line to the end of the process."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._exporter: Exporter | None = None
        self._error: BaseException | None = None
        self._over = False
        self._replacements = 0
        self._log = _log()
        self._process = os.getpid()
        self._attachment = Attachment(
            options.options,
            tell=functools.partial(say, self._log),
            attached=self._attached,
            replaced=self._replaced,
        )
        self._attachment.arm()
        atexit.register(self.close)

    def _attached(self, exporter: Exporter) -> None:
        self._exporter = exporter
        # The exporter's own handler was registered just now, and the last one is called first.
        atexit.unregister(self.close)
        atexit.register(self.close)

    def _replaced(self, exporter: Exporter) -> None:
        """Another one takes its place, for other models: what it knows is kept, and nobody waits for it."""
        exporter.end(KeyboardInterrupt())
        self._replacements += 1
        self._save(exporter, f"-{self._replacements}")

    def ended(self, error: BaseException | None) -> None:
        """The script has come to the end of its code; threads of it may still train."""
        self._error = error

    def close(self) -> None:
        """The process ends: the exporter with it, by what has ended the script; idempotent."""
        if self._over or os.getpid() != self._process:
            return
        self._over = True
        attachment, exporter = self._attachment, self._exporter
        attachment.disarm()
        if exporter is not None:
            exporter.end(self._error)
            self._save(exporter)
        elif not attachment.given_up:
            say(self._log, logging.WARNING, "nothing was watched: %s", attachment.why_not())

    def _save(self, exporter: Exporter, number: str = "") -> None:
        """Writes the history: that of the last models to the file itself, earlier ones and further ranks to files of their own."""
        if self._options.save is None:
            return
        path = self._options.save
        name, dot, kind = path.name.partition(".")
        rank = f"-rank{exporter.rank}" if exporter.rank else ""
        exporter.save(path.with_name(f"{name}{rank}{number}{dot}{kind}"))


def _log() -> logging.Logger:
    """What says on standard error what was found, however the script sets up its logging; of a node's ranks only the first does."""
    log = logging.getLogger("torch_grad_exporter.run")
    log.propagate = False
    log.setLevel(logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.ERROR)
    handler = logging.StreamHandler(sys.__stderr__)
    log.handlers[:] = [handler]
    return log


# Arguments


def parse(arguments: Sequence[str]) -> Options:
    """The command's options, the script and the script's own arguments; what is wrong is said, and exits with 2."""
    parser = _parser()
    ours, target = _split(arguments, parser)
    chosen = parser.parse_args(ours)
    texts: dict[str, list[str]] = {one.name: given for one in OFFERED if (given := getattr(chosen, one.name))}
    if target is None:
        taken = f"; {ours[-1]!r} is an option with its value" if ours else ""
        parser.error(f"name the script to run, as in: torch-grad-exporter run train.py{taken}")
    try:
        options = {one.name: from_command_line(one, texts[one.name]) for one in OFFERED if one.name in texts}
        resolve(options, os.environ)
        push = {name.removeprefix("otlp_"): value for name, value in options.items() if name.startswith("otlp_")}
        push_settings.resolve(**push, environment={})
    except (TypeError, ValueError, ImportError) as error:
        parser.error(str(error))
    return Options(target, options, chosen.save)


def _split(arguments: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], script.Target | None]:
    """The options before the script, and the script with all behind it."""
    ours: list[str] = []
    rest = [*arguments]
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--") and (rest[0][:2] != "-m"):
        one = rest.pop(0)
        if one in ("-h", "--help"):
            return [one], None
        ours.append(_option(one, rest, parser))
    if not rest:
        return ours, None
    first = rest.pop(0)
    if first[:2] == "-m":
        module = first[2:] or (rest.pop(0) if rest else "")
        if not module:
            parser.error("argument -m: name the module to run")
        return ours, script.Target(module, rest, is_module=True)
    if first == "--":
        return ours, script.Target(rest[0], rest[1:]) if rest else None
    return ours, script.Target(first, rest)


def _option(one: str, rest: list[str], parser: argparse.ArgumentParser) -> str:
    """An option of ours as `--name=value`, whose value may be the next argument, which is then taken."""
    name, equals, value = one.partition("=")
    if name not in (*_NAMES, "--save"):
        parser.error(f"unknown option {name}; options of the script stand behind it: {PROGRAM} train.py {one}")
    if name in _NAMES and _NAMES[name].is_switch:
        value = value if equals else "on"
    elif not equals:
        if not rest:
            parser.error(f"argument {name}: expected a value")
        value = rest.pop(0)
    return f"{name}={value}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=USAGE,
        allow_abbrev=False,
        description="Runs a training script as `python train.py` would, with an exporter that watches what it trains. The script "
        "needs no change. Options stand before the script; all behind it is the script's.",
        epilog="with several processes: torchrun --nproc-per-node=2 -m torch_grad_exporter run train.py",
    )
    parser.add_argument("--save", type=_file, metavar="FILE",
        help="write the history to this file at the end, for `torch-grad-exporter plot`")  # fmt: skip
    for name, one in _NAMES.items():
        parser.add_argument(name, action="append", dest=one.name, metavar=_metavar(one), help=_help(one))
    return parser


def _metavar(one: Option) -> str:
    return "[=VALUE]" if one.is_switch else "VALUE"


def _help(option: Option) -> str:
    return option_help(option) + "; may be given several times" * option.may_be_several


def _file(text: str) -> Path:
    path = Path(text).absolute()  # the script may change its working directory
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file that can be written; name one in a folder that is there")
    return path
