"""How groups and commands read their arguments, where that is not typer's way."""

from __future__ import annotations

import shlex
from typing import Any

from typer.core import TyperCommand, TyperGroup

from blendrag.cli import output
from blendrag.cli.lifecycle import USER_ERROR
from blendrag.option import near_names


class SuggestingGroup(TyperGroup):
    """Suggests options that are spelled almost like an unknown one, not those that merely share letters.
    Of a command's options before its name it says where they go."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for option in self.get_params(ctx) for name in option.opts}
        if args and args[0].startswith("-") and args[0] not in own:
            at = next((at for at, word in enumerate(args) if word in self.commands), None)
            if at is not None:
                command, rest = [args[at]], args[at + 1 :]
                if rest and rest[0] in getattr(self.commands[args[at]], "commands", ()):
                    command.append(rest.pop(0))
                corrected = shlex.join([*command, *args[:at], *rest])
                output.say("error", f"options go after the command: {ctx.command_path} {corrected}")
                ctx.exit(USER_ERROR)
        return super().parse_args(ctx, args)

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


class AskingCommand(TyperCommand):
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
        names_none = not begins_with_name and self.commands.keys().isdisjoint(args)
        if names_none and not asks_help:
            args = ["list", *args]
        return super().parse_args(ctx, args)
