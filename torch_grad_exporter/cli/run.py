"""The command `run`: runs a training script with an exporter that it does not know."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_grad_exporter.arguments import near, some
from torch_grad_exporter.cli import script
from torch_grad_exporter.cli.terminal import complain, leave_out, option_help
from torch_grad_exporter.config.option import from_command_line, options_of, resolve
from torch_grad_exporter.config.settings import Arguments, Settings
from torch_grad_exporter.errors import UserError, say
from torch_grad_exporter.integrations.attach import Attachment
from torch_grad_exporter.outputs.otlp import push_settings
from torch_grad_exporter.rules import Wrong
from torch_grad_exporter.rules.context import times

if TYPE_CHECKING:
    from torch_grad_exporter.exporter import Exporter

PROGRAM = "torch-grad-exporter run"

USAGE = "%(prog)s [OPTION ...] SCRIPT [ARGUMENT ...]\n       %(prog)s [OPTION ...] -m MODULE [ARGUMENT ...]"

# Options of `start_exporter` that a text can stand for.
OFFERED = tuple(option for option in (*options_of(Settings), *options_of(Arguments)) if option.is_text)

# Options of which `--help` tells; `--help-all` tells of all.
SHOWN = frozenset({"port", "every", "weights", "activations", "nan_origin", "black_box", "run", "linger", "otlp_endpoint"})

NAMED = 5  # alerts, at most

_VALUES = ("on", "off", "true", "false", "always")
_NAMES = {f"--{option.name.replace('_', '-')}": option for option in OFFERED}


@dataclass(frozen=True)
class RunOptions:
    """The script and the options. `options`: of `start_exporter`. `save`: where the history goes, None for nowhere."""

    target: script.Target
    options: Mapping[str, Any]
    save: Path | None = None


def main(arguments: Sequence[str]) -> int:
    """Run a script with these arguments of the command. Raises what the script raises; wrong arguments exit with 2."""
    options = parse(arguments)
    try:
        script.check(options.target)
    except UserError as error:
        switch = "; a switch takes its value behind an equals sign, as in --weights=on" if options.target.name in _VALUES else ""
        complain(PROGRAM, f"{error}{switch}")
        return 2
    if options.save is not None:
        options.save.resolve().unlink(missing_ok=True)  # else the file of an earlier run would stand for a run that saves none
    watch = ScriptExporter(options)
    try:
        script.run(options.target)
    except BaseException as error:
        watch.error = error
        raise
    return 0


class ScriptExporter:
    """The exporter of a script, from before its first line to the end of the process.

    `log`: takes the lines for the user. `error`: what has ended the script; threads of it may still train then.
    """

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._exporter: Exporter | None = None
        self.error: BaseException | None = None
        self._over, self._replacements, self._process = False, 0, os.getpid()
        # On standard error, however the script sets up its logging; of a node's ranks only the first reports.
        self.log = logging.getLogger("torch_grad_exporter.run")
        self.log.propagate = False
        self.log.setLevel(logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.ERROR)
        self.log.handlers[:] = [logging.StreamHandler(sys.__stderr__)]
        self._attachment = Attachment(self)
        self._attachment.arm()
        atexit.register(self.close)

    def options(self) -> Mapping[str, Any]:
        """Return the options of `start_exporter`."""
        return self._options.options

    def attached(self, exporter: Exporter) -> None:
        """Take the exporter of the script from now on."""
        self._exporter = exporter
        # The exporter's own handler was registered just now, and the last one is called first.
        atexit.unregister(self.close)
        atexit.register(self.close)

    def replaced(self, exporter: Exporter) -> None:
        """End an exporter that another one replaces, for other models; its history is kept."""
        exporter.end(KeyboardInterrupt())
        self._replacements += 1
        self._save(exporter, f"-{self._replacements}")

    def close(self) -> None:
        """End the exporter with the process, by what has ended the script. Idempotent."""
        if self._over or os.getpid() != self._process:
            return
        self._over = True
        self._attachment.disarm()
        if self._exporter is not None:
            self._exporter.end(self.error)
            saved = self._save(self._exporter)
            if (conclusion := self._exporter.conclusion()) is not None:
                say(self.log, logging.INFO, "%s", summary(*conclusion, saved))
        elif not self._attachment.given_up:
            say(self.log, logging.WARNING, "nothing was watched: %s", self._attachment.why_not())

    def _save(self, exporter: Exporter, number: str = "") -> Path | None:
        """Write the history; return where it is.

        That of the last models is in the file itself, those of earlier ones and of further ranks in files of their own.
        """
        if self._options.save is None:
            return None
        path = self._options.save
        name, dot, kind = path.name.partition(".")
        rank = f"-rank{exporter.rank}" if exporter.rank else ""
        file = path.with_name(f"{name}{rank}{number}{dot}{kind}")
        try:
            exporter.save(file)
        except OSError as error:
            say(self.log, logging.ERROR, "%s", error)
        return file if file.exists() else None


def summary(status: Mapping[str, Any], wrong: Sequence[Wrong], saved: Path | None) -> str:
    """Return what became of a run, by the `status` of the live page, everything that was `wrong`, and where it is saved."""
    state = f"failed by {status['ended_by']}" if status["ended_by"] else status["state"] or "ended"
    steps = "" if status["step"] is None else f" after {times(status['step'])}"
    norm, nonfinite = status["global_norm"], status["nonfinite_steps"]
    alerts = list(dict.fromkeys(problem.alert for problem in wrong))
    parts = [
        times(status["samples"], "sample"),
        "no gradient norm" if norm is None else f"last gradient norm {float(norm):.4g}",
        f"NaN or Inf in {times(nonfinite)}" if nonfinite else "no NaN or Inf seen",
        f"problems: {some(alerts, NAMED)}" if alerts else "no problems",
    ]
    kept = f"saved to {saved}" if saved else "nothing was saved: --save FILE keeps the history, --linger SECONDS the page"
    return f"{state}{steps}: {', '.join(parts)}; {kept}"


def parse(arguments: Sequence[str]) -> RunOptions:
    """Return the command's options, the script and its own arguments; wrong ones print a message and exit with 2."""
    parser, ours, rest = _parser(), list[str](), [*arguments]
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--") and rest[0][:2] != "-m":
        ours.append(_option(rest.pop(0), rest, parser))
    chosen = parser.parse_args(ours)
    name = rest.pop(0) if rest else "--"
    is_module = name[:2] == "-m"
    if name in ("-m", "--"):
        name = rest.pop(0) if rest else ""
    elif is_module:
        name = name[2:]
    if not name:
        taken = f"; {ours[-1]!r} is an option with its value" if ours else ""
        missing = f"name the script to run, as in: torch-grad-exporter run train.py{taken}"
        parser.error("argument -m: name the module to run" if is_module else missing)
    texts: dict[str, list[str]] = {option.name: given for option in OFFERED if (given := getattr(chosen, option.name))}
    try:
        options = {option.name: from_command_line(option, texts[option.name]) for option in OFFERED if option.name in texts}
        resolve(options, os.environ)
        push: dict[str, Any] = {name.removeprefix("otlp_"): value for name, value in options.items() if name.startswith("otlp_")}
        push_settings.resolve(**push, environment={})
    except (TypeError, ValueError, ImportError) as error:
        parser.error(str(error))
    return RunOptions(script.Target(name, rest, is_module), options, chosen.save)


def _option(argument: str, rest: list[str], parser: argparse.ArgumentParser) -> str:
    """Return an option as `--name=value`. Its value may be the next argument, which is then taken."""
    if argument in ("-h", "--help", "--help-all"):
        parser.parse_args([argument])  # exits
    name, equals, value = argument.partition("=")
    if name not in (*_NAMES, "--save"):
        meant = near(name, (*_NAMES, "--save"), prefix="--")
        parser.error(f"unknown option {name}{meant}; options of the script stand behind it: {PROGRAM} train.py {argument}")
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
    rest = []
    for name, option in _NAMES.items():
        several = "; may be given several times" * option.may_be_several
        metavar = "[=VALUE]" if option.is_switch else "VALUE"
        added = parser.add_argument(name, action="append", dest=option.name, metavar=metavar, help=option_help(option) + several)
        if option.name not in SHOWN:
            rest.append(added)
    leave_out(parser, rest)
    return parser


def _file(text: str) -> Path:
    path = Path(text).absolute()  # the script may change its working directory
    if (path.exists() and not path.is_file()) or not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; name a file in an existing folder")
    return path
