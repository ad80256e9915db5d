# fish completion for deltactl

function __deltactl_complete
    env _DELTACTL_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv[1] \
        _TYPER_COMPLETE_ARGS=(commandline -cp | string collect --allow-empty) deltactl 2>/dev/null
end

complete --command deltactl --no-files --arguments "(__deltactl_complete get-args)" \
    --condition "__deltactl_complete is-args"
