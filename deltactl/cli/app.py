"""The application: its commands, and what becomes of the errors that they raise."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn, get_args

import typer
from typer._click.exceptions import ClickException
from typer.core import TyperGroup

from deltactl import __version__
from deltactl.chain.store import refuse_secret
from deltactl.cli.apply import apply
from deltactl.cli.bench import bench
from deltactl.cli.clean import clean
from deltactl.cli.copy import copy
from deltactl.cli.demo import demo
from deltactl.cli.diff import diff
from deltactl.cli.doctor import doctor
from deltactl.cli.env import env
from deltactl.cli.interface import exits
from deltactl.cli.interface.completion import SCRIPTS, VARIABLE, Shell
from deltactl.cli.interface.logged import logged
from deltactl.cli.interface.manual import Verb
from deltactl.cli.interface.output import Output
from deltactl.cli.log import log
from deltactl.cli.pull import pull
from deltactl.cli.push import push
from deltactl.cli.show import show
from deltactl.cli.stats import stats
from deltactl.cli.verify import verify
from deltactl.core.errors import DeltactlError, UsageError

NAME = "deltactl"


class Root(TyperGroup):
    """The group of all commands. Every way that one can end becomes an exit status here."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command line ``args``, by default the process's, and exit."""
        args = list(sys.argv[1:] if args is None else args)
        if VARIABLE in os.environ:
            _prepare_completion()
        out = Output()
        try:
            _refuse_secrets(out, args)
            with out.logged():
                code = super().main(
                    args,
                    prog_name=NAME,
                    complete_var=VARIABLE,
                    standalone_mode=False,
                    obj=out,
                    **extra,
                )
            sys.stdout.flush()
        except BrokenPipeError:
            code = _reader_is_gone()
        except (DeltactlError, OSError, MemoryError) as error:
            code = _failed(out, error, next((word for word in args if word in self.commands), ""))
        except ClickException as error:
            code = _misused(out, error, args)
        except Exception as error:
            what = f"internal error: {type(error).__name__}: {error}"
            out.failure(DeltactlError(what, hint="report this, with the lines below"), exits.FAILED)
            raise
        sys.exit(code if isinstance(code, int) else exits.OK)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands group by group, all in columns of one width."""
        width = max(len(name) for name in self.commands)
        for group, functions in GROUPS.items():
            commands = [self.commands[function.__name__] for function in functions]
            rows = [(f"{c.name or '':<{width}}", c.get_short_help_str()) for c in commands]
            with formatter.section(group):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the table of exit statuses and the environment after the commands."""
        with formatter.section("Exit status"):
            formatter.write_dl([(str(code), text) for code, text in exits.MEANINGS.items()])
        with formatter.section("Environment"):
            formatter.write_dl(list(ENVIRONMENT.items()))


ENVIRONMENT = {
    "DELTACTL_CACHE": "Where push keeps the tips of chains; by default deltactl below "
    "XDG_CACHE_HOME or ~/.cache.",
    "DELTACTL_SERVER_HEADERS": "Headers for requests to vLLM servers, 'Name: value' a line, for "
    "what stands before them; no command prints them.",
    "NO_COLOR": "If set and not empty, no colour, bold or dim text is printed.",
    "TMPDIR": "Where deltas and anchors are made ready, and where verify and copy put what they "
    "fetch, and bench what it makes; by default the system's place for that.",
    "VLLM_API_KEY": "The key that vLLM servers, or what stands before them, ask for; no command "
    "prints it.",
}
"""Variables that change what commands do; the manual's table."""

app = typer.Typer(
    name=NAME,
    cls=Root,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
GROUPS = {
    "Chains": (push, pull, copy, log, verify, clean),
    "Checkpoints and deltas": (diff, apply, show, stats),
    "Servers": (doctor,),
    "Other": (demo, bench, env),
}
"""All commands, as help shows them."""

for functions in GROUPS.values():
    for function in functions:
        app.command(cls=Verb)(logged(function))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{NAME} {__version__}")
        raise typer.Exit


def _print_script(shell: Shell | None) -> None:
    if shell is not None:
        print(SCRIPTS[shell], end="")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    completion: Annotated[
        Shell | None,
        typer.Option(
            "--show-completion",
            metavar="|".join(get_args(Shell)),
            help="Print the script that completes commands and options in this shell.",
            callback=_print_script,
            is_eager=True,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Ship a trainer's weights to inference servers: full anchors now and then, small deltas
    between.

    A chain lives in a bucket: a local directory, the Hugging Face Hub, S3, Google Cloud or Azure.
    Each link names the state it starts from and the state it leads to, so any step can be rebuilt
    and checked bit for bit.

    Results go to stdout, everything else to stderr. With --json every command prints one object on
    stdout; a command that fails prints an object with the single key "error": what, file, tensor,
    step, expected, found, hint, exit_code. Options may come anywhere after the command.
    """


def _prepare_completion() -> None:
    from typer import _completion_classes

    # Typer would import rich to take markup out of help texts; ours has none.
    _completion_classes._sanitize_help_text = lambda text: text
    _completion_classes.completion_init()


def _refuse_secrets(out: Output, args: Sequence[str]) -> None:
    """Refuse passwords before anything looks at the words, and might repeat them."""
    try:
        for word in args:
            refuse_secret(word)
    except UsageError:
        out.configure(json="--json" in args, quiet=False)
        raise


def _failed(out: Output, error: DeltactlError | OSError | MemoryError, verb: str) -> int:
    known = error if isinstance(error, DeltactlError) else exits.from_system(error)
    known = _torn() or known
    if isinstance(known, UsageError) and known.hint is None:
        known.hint = f"{NAME} {verb} --help"
    code = exits.code_of(known)
    out.failure(known, code)
    return code


def _torn() -> DeltactlError | None:
    """A file that was torn while it was mapped: whatever else was said comes of that."""
    module = sys.modules.get("deltactl.files.mapped")  # not imported for commands that map nothing
    return None if module is None else module.mapped_fault()


def _misused(out: Output, error: ClickException, args: Sequence[str]) -> int:
    """A command line that Typer refused, perhaps before it came to the options for output."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
        return exits.USAGE
    if "--json" in args:
        out.configure(json=True, quiet=False)
    context = getattr(error, "ctx", None)
    hint = f"{context.command_path if context else NAME} --help"
    what = error.format_message().replace("Value error, ", "").rstrip(".")
    out.failure(UsageError(what[:1].lower() + what[1:], hint=hint), error.exit_code)
    return error.exit_code


def _reader_is_gone() -> int:
    """Whoever read stdout has closed it, as ``head`` does: end without a word."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())  # so that the flush at exit does not fail again
    os.close(devnull)
    return exits.FAILED


def main() -> None:
    """The process's entry point."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: then nobody listens
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show
    with contextlib.suppress(OSError, ValueError):  # stderr is no file
        faulthandler.enable()  # so that nothing, as a mapped file that shrinks, ends us in silence
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # As Ctrl-C: a server that is paused is resumed, and temporary files are removed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except SystemExit as end:
        if end.code and threading.active_count() > 1:
            _leave(end.code)
        raise


def _leave(code: Any) -> NoReturn:
    """End while requests still hang, which an orderly end might wait for, or trip over."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else exits.FAILED)
