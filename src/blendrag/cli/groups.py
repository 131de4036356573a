"""How groups and commands read their arguments, where that is not typer's way."""

from __future__ import annotations

import inspect
import shlex
import sys
from typing import Any, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.models import ArgumentInfo, OptionInfo

from blendrag.cli import output
from blendrag.cli.lifecycle import USER_ERROR
from blendrag.option import did_you_mean, near_names


class SuggestingGroup(TyperGroup):
    """Suggests options and commands that are spelled almost like an unknown one, not those that merely share
    letters, and commands of that name in other groups.
    Of a command's options before its name it says where they go."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for option in self.get_params(ctx) for name in option.opts}
        if args and args[0].startswith("-") and args[0] not in own:
            at = self.place_of_command(ctx, args)
            if at is not None:
                command, rest = [args[at]], args[at + 1 :]
                if rest and rest[0] in getattr(self.commands[args[at]], "commands", ()):
                    command.append(rest.pop(0))
                corrected = shlex.join([*command, *args[:at], *rest])
                output.say("error", f"options go after the command: {ctx.command_path} {corrected}")
                ctx.exit(USER_ERROR)
        return super().parse_args(ctx, args)

    def place_of_command(self, ctx: Any, args: list[str]) -> int | None:
        """Where a command's name follows options and their values, of which one may be the name of another
        command. Names after options that the command has go before those after others."""
        named = [at for at, word in enumerate(args) if word in self.commands]
        for allow_unknown in (False, True):
            for at in named:
                options = self._options_of(ctx, args[at:])
                if _are_options(args[:at], options, allow_unknown):
                    return at
        return None

    def _options_of(self, ctx: Any, words: list[str]) -> dict[str, bool]:
        """Names of the options of the command that ``words`` begin with, and whether each takes a value."""
        command: Any = self.commands[words[0]]
        if isinstance(command, TyperGroup):
            name = words[1] if words[1:] and words[1] in command.commands else "list"
            command = command.commands.get(name, command)
        return {
            name: not option.is_flag
            for option in command.get_params(ctx)
            if isinstance(option, TyperOption)
            for name in (*option.opts, *option.secondary_opts)
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.suggest_commands = False  # typer's merely share letters
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            near = near_names(args[:1], self.commands) or [
                f"{group} {args[0]}"
                for group, each in self.commands.items()
                if args[0] in getattr(each, "commands", ())
            ]
            if near and hasattr(error, "message"):
                error.message += f" {did_you_mean(near, '').capitalize()}"
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # NoSuchOption is click's, or typer's copy of it, depending on typer's version
            if possible := getattr(error, "possibilities", None):
                names = {name.lstrip("-"): name for name in possible}
                near = near_names([str(getattr(error, "option_name", "")).lstrip("-")], names)
                error.possibilities = [names[name] for name in near]  # type: ignore[attr-defined]
            raise


def _are_options(words: list[str], takes_value: dict[str, bool], allow_unknown: bool) -> bool:
    """Whether ``words`` are options and their values. Of unknown options a value may follow or not."""
    at = 0
    while at < len(words):
        name, equals, _ = words[at].partition("=")
        if not name.startswith("-") or (name not in takes_value and not allow_unknown):
            return False
        at += 1
        if name not in takes_value:
            at += at < len(words) and not words[at].startswith("-")
        elif takes_value[name] and not equals:
            at += 1
    return at == len(words)


class NamingCommand(TyperCommand):
    """Help and usage name arguments ``QUESTION`` and ``PATH...``, where typer (0.29) writes ``{question}``
    and ``paths... <list[Path]>``."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for each in self.params:
            if type(each) is TyperArgument:
                each.__class__ = _NamedArgument

    def get_short_help_str(self, limit: int = 0) -> str:
        """The whole sentence, which a list of commands wraps."""
        return super().get_short_help_str(sys.maxsize)


class _NamedArgument(TyperArgument):
    def get_usage_pieces(self, ctx: Any) -> list[str]:
        name = f"{self.metavar}{'...' * (self.nargs != 1)}"
        return [name if self.required else f"[{name}]"]

    def get_help_record(self, ctx: Any) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (self.get_usage_pieces(ctx)[0], record[1])


class AskingCommand(NamingCommand):
    """A command that takes one question, or none; of several words it says to quote them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        super().parse_args(ctx, args)
        if ctx.args:
            if first := ctx.params.get("question"):
                question, command = " ".join([first, *ctx.args]), ctx.command_path
                wrong = f"{command} takes a question in quotes"
            else:
                question, command = " ".join(ctx.args), "blendrag ask"
                wrong = f"{ctx.command_path} reads its questions from the terminal; for one alone"
            output.say("error", f'{wrong}: {command} "{question}"')
            ctx.exit(USER_ERROR)
        return []


class ListingGroup(SuggestingGroup):
    """A group that runs its command ``list`` if none is named, with the options that follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        asks_help = args[:1] and args[0] in ctx.help_option_names
        begins_with_name = args and not args[0].startswith("-")
        names_none = not begins_with_name and self.place_of_command(ctx, args) is None
        if names_none and not asks_help:
            args = ["list", *args]
        return super().parse_args(ctx, args)


def name_values(commands: typer.Typer) -> None:
    """Let the help of all commands say PATH and TEXT where typer (0.29) would name a type of Python, such as
    ``<list[Path]>``."""
    for group in commands.registered_groups:
        assert group.typer_instance is not None
        name_values(group.typer_instance)
    for command in commands.registered_commands:
        assert command.callback is not None
        if command.cls is TyperCommand:
            command.cls = NamingCommand
        # kept, because evaluated annotations are new objects each time
        signature = inspect.signature(command.callback, eval_str=True)
        command.callback.__signature__ = signature  # type: ignore[attr-defined]
        for each in signature.parameters.values():
            for info in get_args(each.annotation)[1:]:
                if isinstance(info, ArgumentInfo | OptionInfo) and info.metavar is None:
                    otherwise = each.name.upper() if isinstance(info, ArgumentInfo) else "TEXT"
                    info.metavar = _value_name(get_args(each.annotation)[0], otherwise)


def _value_name(kind: Any, otherwise: str) -> str | None:
    names = str(kind)
    if "Path" in names:
        return "PATH"
    if "str" in names:
        return otherwise
    return "NUMBER" if "float" in names else None
