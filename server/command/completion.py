"""`slipstream completion`: scripts with which bash, zsh and fish complete the command line, from its own tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.engine.naming import ALL_DRAFTERS, DRAFTERS, NO_DRAFTER
from slipstream.server.command.flags import Option
from slipstream.server.command.subcommand import Subcommand

SHELLS = ("bash", "zsh", "fish")
# zsh keeps `--flag=value` as one word, and wants all of it back.
_BASH = """\
_slipstream() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} subcommand=serve flag= words
    case ${{COMP_WORDS[1]}} in {names}) subcommand=${{COMP_WORDS[1]}};; esac
    [[ $prev == = ]] && prev=${{COMP_WORDS[COMP_CWORD-2]}}
    [[ $cur == = ]] && prev=${{COMP_WORDS[COMP_CWORD-1]}} && cur=
    [[ $cur == --*=* ]] && flag=${{cur%%=*}}= prev=${{cur%%=*}} cur=${{cur#*=}}
    COMPREPLY=()
    case $subcommand:$prev in
{values}
    esac
    case $subcommand in
{flags}
    esac
    [[ $COMP_CWORD == 1 ]] && words="{spaced} $words"
    [[ -z $cur && $COMP_CWORD != 1 ]] || COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _slipstream slipstream
"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit -u && bashcompinit\n"


def script(shell: str, commands: Mapping[str, Subcommand]) -> str:
    """What the shell is to read. shell: of `SHELLS`. Where no word fits, shells complete files by themselves."""
    if shell == "fish":
        return "\n".join(["complete -c slipstream -e", *_fish(commands)]) + "\n"
    text = _BASH.format(
        names="|".join(commands),
        spaced=" ".join(commands),
        values="\n".join(_bash_values(commands)),
        flags="\n".join(
            f'        {name}) words="{" ".join(sorted(one.flags))}";;' for name, one in commands.items()
        ),
    )
    return text if shell == "bash" else _ZSH + text


def _values(option: Option) -> Sequence[str]:
    """The values that a setting may have, if they can be listed."""
    if option.name == "spec_type":
        return (*DRAFTERS, NO_DRAFTER, ALL_DRAFTERS)
    return tuple(option.meta["choices"])


def _bash_values(commands: Mapping[str, Subcommand]) -> list[str]:
    lines = []
    for name, command in commands.items():
        for option in command.options:
            if option.is_switch:
                continue
            pattern = "|".join(f"{name}:{flag}" for flag in option.flags)
            # A value that cannot be listed is a file, or up to the user.
            words = " ".join(_values(option))
            lines.append(
                f'        {pattern}) COMPREPLY=($(compgen -P "$flag" -W "{words}" -- "$cur")); return;;'
            )
        if command.positional is not None:
            word = " ".join(command.positional[1])
            lines.append(f'        {name}:{name}) COMPREPLY=($(compgen -W "{word}" -- "$cur")); return;;')
    return lines


def _fish(commands: Mapping[str, Subcommand]) -> list[str]:
    lines, others = [], " ".join(name for name in commands if name != "serve")
    for name, command in commands.items():
        about = _quoted(command.summary)
        lines.append(f"complete -c slipstream -n __fish_use_subcommand -a {name} -d {about}")
        seen = (
            f"not __fish_seen_subcommand_from {others}"
            if name == "serve"
            else f"__fish_seen_subcommand_from {name}"
        )
        here = f"complete -c slipstream -n '{seen}'"
        if command.positional is not None:
            lines.append(f"{here} -x -a '{' '.join(command.positional[1])}'")
        for option in command.options:
            told = _quoted(option.meta["meaning"])
            lines.append(f"{here} {_fish_flags(option.flags)} {_fish_value(option)} -d {told}")
            if option.is_switch:
                lines.append(f"{here} {_fish_flags([option.no_flag])}")
        for one in command.all_arguments:
            needs = "" if one.metavar is None else " -r"
            lines.append(f"{here} {_fish_flags([one.flag])}{needs} -d {_quoted(one.meaning)}")
    return lines


def _fish_flags(flags: Sequence[str]) -> str:
    return " ".join(f"-l {flag[2:]}" if flag[:2] == "--" else f"-o {flag[1:]}" for flag in flags)


def _fish_value(option: Option) -> str:
    if option.is_switch:
        return ""
    return f"-x -a '{' '.join(_values(option))}'" if _values(option) else "-r"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
