#!/usr/bin/env bash
# The work of action.yml, as a file so that it is tested. Its inputs are variables of the environment.
set -uo pipefail

split() { # one word of a line in each line, by a shell's quotes; nothing is expanded
  [ -z "$1" ] || xargs -n 1 printf '%s\n' <<<"$1"
}

mapfile -t command < <(split "$COMMAND")
mapfile -t options < <(split "$OPTIONS")
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
echo "verdict=$verdict" >>"$GITHUB_OUTPUT"
printf '### verify-resume: %s\n\n%s\n' "$verdict" "$message" >>"$GITHUB_STEP_SUMMARY"
printf '%s: %s\n' "$verdict" "$message"
[ "$verdict" = nondeterministic ] && [ "$FAIL_ON" = differs ] && exit 0
exit "$code"
