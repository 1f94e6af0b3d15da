#!/usr/bin/env bash
# The work of action.yml, as a file so that it is tested. Its inputs are variables of the environment.
set -uo pipefail

tell() { # a verdict and a message
  echo "verdict=$1" >>"$GITHUB_OUTPUT"
  printf '### verify-resume: %s\n\n%s\n' "$1" "$2" >>"$GITHUB_STEP_SUMMARY"
  printf '%s: %s\n' "$1" "$2"
}
split() { # into an array, the words of a variable by a shell's quotes; nothing is expanded
  local -n words=$1
  local text=${!2//$'\\\n'/ } lines
  lines=$([ -z "${text//[[:space:]]/}" ] || xargs -n 1 printf '%s\n' <<<"$text" && echo end) || {
    tell failed "$2 has a quote without its end: ${!2}"
    exit 2
  }
  mapfile -t words <<<"$lines"
  unset "words[-1]"
}

split command COMMAND
split options OPTIONS
[ -z "$PRESET" ] || options+=(--preset "$PRESET")
[ -z "$AT" ] || options+=(--at "$AT")
[ -z "$UNTIL" ] || options+=(--until "$UNTIL")
mkdir -p "$REPORT"
options+=(--html "$REPORT/report.html" --junit "$REPORT/report.xml" --json)

ckpttool verify-resume run "${options[@]}" -- "${command[@]}" >"$REPORT/report.json"
code=$?
read_field() { # of the report, or of the error that took its place
  python -c 'import json, sys; found = json.load(open(sys.argv[1])); print(found.get("error", found).get(sys.argv[2]) or "")' \
    "$REPORT/report.json" "$1" 2>/dev/null
}
verdict=$(read_field verdict)
message=$(read_field message)
: "${verdict:=failed}" "${message:=ckpttool could not judge the command: exit code $code}"
tell "$verdict" "$message"
[ "$verdict" = nondeterministic ] && [ "$FAIL_ON" = differs ] && exit 0
exit "$code"
