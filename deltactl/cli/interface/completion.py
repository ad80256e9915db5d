"""The scripts that teach bash, zsh and fish to complete ``deltactl``.

They ask the command itself, by Typer's protocol. Typer's own scripts are not used: its bash script
breaks words at ":" and so every address, and its zsh script does nothing at the first TAB.
"""

from __future__ import annotations

from typing import Literal

Shell = Literal["bash", "zsh", "fish"]

VARIABLE = "_DELTACTL_COMPLETE"
"""Set in the environment when the command is asked for completions."""

_BASH = r"""# bash completion for deltactl

# Readline ends words at ":", "=" and "@", which addresses and steps contain. So the command gets
# the line itself, and what readline holds for finished is cut off the replies.
_deltactl_completion() {
    local line=${COMP_LINE:0:COMP_POINT}
    local word=${line##*[[:space:]]}
    local finished=${word%"${word##*[:=@]}"}
    mapfile -t COMPREPLY < <(
        env _DELTACTL_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
            _TYPER_COMPLETE_ARGS="$line" "$1" 2>/dev/null | cut -f 1
    )
    COMPREPLY=("${COMPREPLY[@]#"$finished"}")
    if [[ -z ${COMPREPLY[*]} ]]; then
        COMPREPLY=()
    fi
    if [[ $word == *://* ]]; then
        compopt +o default # an address names no file of this machine
    fi
}

complete -o default -F _deltactl_completion deltactl
"""

_ZSH = r"""#compdef deltactl

_deltactl_completion() {
  eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _DELTACTL_COMPLETE=complete_zsh \
    ${words[1]} 2>/dev/null)
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _deltactl_completion "$@"
else
  compdef _deltactl_completion deltactl
fi
"""

_FISH = r"""# fish completion for deltactl

function __deltactl_complete
    env _DELTACTL_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv[1] \
        _TYPER_COMPLETE_ARGS=(commandline -cp | string collect --allow-empty) deltactl 2>/dev/null
end

complete --command deltactl --no-files --arguments "(__deltactl_complete get-args)" \
    --condition "__deltactl_complete is-args"
"""

SCRIPTS: dict[Shell, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""Each shell's script."""
