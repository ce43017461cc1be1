"""The one place where an error becomes an exit code and a line on stderr.

    0    done
    1    failed (a peer is gone, a bug, an operating system error)
    2    the input is wrong: fix it and call again
    130  Ctrl-C

No traceback unless --debug is given.
"""

from __future__ import annotations

import os
import sys

import click

from anabranch.core.errors import AnabranchError, ConfigError, InvalidInput, MissingExtra

# Module → the extra that installs it.
EXTRAS = {
    "torch": "engine",
    "numpy": "engine",
    "safetensors": "engine",
    "gguf": "engine",
    "starlette": "serve",
    "uvicorn": "serve",
    "httptools": "serve",
    "httpx": "serve",
    "prometheus_client": "serve",
    "tokenizers": "serve",
    "jinja2": "serve",
    "cryptography": "security",
    "obstore": "s3",
    "opentelemetry": "otel",
}


def run_guarded(command: click.Command, args: list[str]) -> int:
    """Run a click command and return its exit code; errors are reported as `error: …` lines."""
    debug = "--debug" in args[: _first_word(args)]
    try:
        result = command.main(args=args, prog_name="anabranch", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.secho("interrupted", err=True)
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        report(_usage_line(error))
        return 2
    except BrokenPipeError:
        # The reader of our stdout went away (`anabranch … | head`): nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if debug:
            raise
        missing = (error.name or "").partition(".")[0]
        report(str(MissingExtra(EXTRAS[missing], missing)) if missing in EXTRAS else f"internal error: {error}")
        return 2 if missing in EXTRAS else 1
    except AnabranchError as error:
        if debug:
            raise
        if isinstance(error, ConfigError):
            for problem in str(error).splitlines():
                report(problem)
        else:
            report(str(error))
        return 2 if isinstance(error, InvalidInput) else 1
    except OSError as error:
        if debug:
            raise
        report(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        return 1
    except Exception as error:  # the outermost boundary: a bug becomes one line and exit code 1
        if debug:
            raise
        report(f"internal error: {type(error).__name__}: {error} (run `anabranch --debug …` for the traceback)")
        return 1


def report(message: str) -> None:
    """One red `error: …` line; further lines (the tail of a log) follow as they are."""
    first, _, rest = message.partition("\n")
    click.secho(f"error: {first}", fg="red", err=True)
    if rest:
        click.echo(rest, err=True)


def _usage_line(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see `{context.command_path} --help`)" if context is not None else ""
    return error.format_message().rstrip(".") + hint


def _first_word(args: list[str]) -> int:
    """Index of the first argument that is not an option: the command's name."""
    return next((index for index, arg in enumerate(args) if not arg.startswith("-")), len(args))
