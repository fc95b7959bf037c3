_keepstep() {
  local -a found
  found=(${(f)"$(_keepstep_words "${(@)words[2,CURRENT]}")"})
  compadd -S '' -- ${(M)found:#*[=:/]}
  compadd -- ${found:#*[=:/]}
  _files
}
compdef _keepstep keepstep
