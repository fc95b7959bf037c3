_keepstep() {
  local words current prefix line="${COMP_LINE:0:COMP_POINT}"
  read -ra words <<<"$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  current="${words[-1]}"
  # readline replaces only what follows the last = or : of the word.
  prefix="${current%"${current##*[=:]}"}"
  local IFS=$'\n'
  COMPREPLY=($(compgen -W "$(_keepstep_words "${words[@]:1}")" -- "$current"))
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=:/] ]] && compopt -o nospace 2>/dev/null
  COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}
complete -o default -F _keepstep keepstep
