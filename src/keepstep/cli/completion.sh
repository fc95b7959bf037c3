# Completion of keepstep. bash: eval "$(keepstep completion bash)"; zsh: the same with zsh, after compinit.
# Everything is in this script: a Tab starts no Python. Make it again after an update.
_keepstep_words() { # the words after `keepstep`, the last one is being completed
  local word previous= current= verb="$1"
  for word in "$@"; do
    previous="$current" current="$word"
  done
  if [ $# -le 1 ]; then
    printf '%s\n' @VERBS@
    return
  fi
  case "$verb:$previous" in
    @VALUES@
  esac
  case "$verb:$current" in
    @CASES@
  esac
}
