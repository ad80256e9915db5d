# bash completion for deltactl

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
