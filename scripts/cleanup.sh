#!/usr/bin/env bash
# Ends emulators and adb servers that device workers of this project left behind. Nothing else is touched:
#   * processes are ended by recorded id and start time, so an id that means another process by now is left alone;
#     emulators and adb servers of this user without a record, by ROLLOUT_BUFFER_DEVICE in their environment;
#   * processes that another checkout or installation started are ended only with --all, and after a yes;
#   * virtual devices are removed only if base_avd_name_pattern fits, the clone's own mark is in them, and no
#     running emulator uses them.
# Stop the buffer first: a running one starts its emulators again.
#
#   scripts/cleanup.sh              emulators and adb servers
#   scripts/cleanup.sh --avd        and the cloned virtual devices
#   scripts/cleanup.sh --all        and temporary folders, port locks and records; asks before it ends other farms
#   scripts/cleanup.sh --all --yes  does not ask
#   scripts/cleanup.sh --dry-run    prints its actions without executing them; combines with the others
#   scripts/cleanup.sh --config F   settings; else ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG, else the shipped config.yaml
#
# The variables ROLLOUT_BUFFER_ANDROID_WORLD__ANDROID_AVD_HOME and …__BASE_AVD_NAME_PATTERN come before the file, as
# they do for the devices. What `serve` was given as --android has to be given here in one of these ways.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
config=${ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG:-$here/slime_plugins/rollout_buffer/generator/android_world/config.yaml}
records=${ROLLOUT_BUFFER_DEVICE_RECORDS:-/tmp/rollout_buffer_devices_$(id -u)}
locks=${ROLLOUT_BUFFER_PORT_LOCKS:-/tmp/rollout_buffer_ports_$(id -u)}
temporary=${ROLLOUT_BUFFER_DEVICE_TMP:-/tmp}
boot=$(cat /proc/sys/kernel/random/boot_id)
remove_avds=false remove_all=false dry_run=false agreed=false
watchdog_patience=25 patience=10

while [ $# -gt 0 ]; do
    case $1 in
    --avd) remove_avds=true ;;
    --all) remove_avds=true remove_all=true ;;
    --dry-run) dry_run=true ;;
    --yes) agreed=true ;;
    --config)
        config=${2:?--config needs a file}
        shift
        ;;
    -h | --help)
        sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *)
        echo "cleanup: unknown option $1; --help lists them" >&2
        exit 2
        ;;
    esac
    shift
done
[ -r "$config" ] || {
    echo "cleanup: $config cannot be read" >&2
    exit 2
}

setting() { # setting KEY DEFAULT: a variable's value, or that of the YAML file's line, without quotes and comment
    local value variable=ROLLOUT_BUFFER_ANDROID_WORLD__${1^^}
    value=${!variable-$(sed -nE "s/^$1:[[:space:]]*//p" "$config" | head -n 1)}
    value=$(sed -E 's/[[:space:]]+#.*$//; s/[[:space:]]+$//' <<<"$value")
    value=${value#[\"\']}
    value=${value%[\"\']}
    echo "${value:-$2}"
}

avd_home=$(setting android_avd_home /root/android/avd/)
avd_home=${avd_home/#\~/$HOME}
pattern=$(setting base_avd_name_pattern 'slime_aw_{}')
before=${pattern%%'{}'*} after=${pattern#*'{}'}

fits_pattern() { # fits_pattern NAME: is it the name of a clone?
    local number=${1#"$before"}
    [ "$number" != "$1" ] || [ -z "$before" ] || return 1
    [ -z "$after" ] || [ "${number%"$after"}" != "$number" ] || return 1
    number=${number%"$after"}
    [[ $number =~ ^[0-9]+$ ]]
}

start_of() { # start_of PID: clock ticks since boot at its start; nothing if it does not live
    local text fields
    text=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
    read -r -a fields <<<"${text##*) }"
    [ "${fields[0]}" = Z ] || echo "${fields[19]}"
}

lives() { # lives PID START: is it still this very process, and this user's?
    [ "$(start_of "$1")" = "$2" ] && [ -O "/proc/$1" ]
}

signal() { # signal SIGNAL PID START: sends it to the process, or to its process group if it leads one
    lives "$2" "$3" || return 0
    local text fields
    text=$(cat "/proc/$2/stat" 2>/dev/null) || return 0
    read -r -a fields <<<"${text##*) }"
    if [ "${fields[2]}" = "$2" ]; then
        kill -s "$1" -- "-$2" 2>/dev/null || true
    else
        kill -s "$1" "$2" 2>/dev/null || true
    fi
}

value_of() { # value_of FILE KEY
    sed -n "s/^$2=//p" "$1" | head -n 1
}

own=()    # "PID START KIND AVD" of this checkout's processes, watchdogs first: they end their emulator in order
others=() # the same of another checkout's or installation's, with its folder

add_process() { # add_process CHECKOUT PID START KIND AVD
    if [ "$1" = "$here" ]; then own+=("${*:2}"); else others+=("${*:2} $1"); fi
}

find_recorded() { # find_recorded KIND
    local record name pid start avd
    for record in "$records"/*-*; do
        name=${record##*/}
        if ! [[ $name =~ ^[0-9]+-[0-9]+$ ]] || [ "$(value_of "$record" kind)" != "$1" ]; then continue; fi
        pid=${name%-*} start=${name#*-} avd=$(value_of "$record" avd)
        if [ "$(value_of "$record" boot)" = "$boot" ] && fits_pattern "$avd" && lives "$pid" "$start"; then
            add_process "$(value_of "$record" checkout)" "$pid" "$start" "$1" "$avd"
        fi
    done
}

find_marked() { # emulators and adb servers without a record: a watchdog that was killed at the wrong moment
    local folder pid avd command checkout
    for folder in /proc/[0-9]*; do
        pid=${folder#/proc/}
        if [ ! -O "$folder" ] || [ "$pid" = $$ ]; then continue; fi
        avd=$(tr '\0' '\n' 2>/dev/null <"$folder/environ" | sed -n 's/^ROLLOUT_BUFFER_DEVICE=//p' | head -n 1) || continue
        if [ -z "$avd" ] || ! fits_pattern "$avd"; then continue; fi
        command=$(tr '\0' ' ' 2>/dev/null <"$folder/cmdline") || continue
        case $command in
        *" -avd $avd "* | *" fork-server server "*) ;;
        *) continue ;;
        esac
        checkout=$(tr '\0' '\n' 2>/dev/null <"$folder/environ" | sed -n 's/^ROLLOUT_BUFFER_DEVICE_CHECKOUT=//p') || continue
        case " ${own[*]-} ${others[*]-} " in
        *" $pid $(start_of "$pid") "*) ;;
        *) add_process "$checkout" "$pid" "$(start_of "$pid")" unrecorded "$avd" ;;
        esac
    done
}

include_others() { # with --all, after a confirmation; otherwise only listed
    local entry answer
    [ ${#others[@]} -gt 0 ] || return 0
    if $remove_all && ! $agreed && ! $dry_run && [ -t 0 ]; then
        printf '%s\n' "${others[@]}" >&2
        read -r -p "cleanup: end these, too, which other checkouts started (PID START KIND DEVICE CHECKOUT)? [y/N] " answer
        case $answer in [yY]*) agreed=true ;; esac
    fi
    if $remove_all && $agreed; then
        for entry in "${others[@]}"; do own+=("$(cut -d' ' -f1-4 <<<"$entry")"); done
        others=()
    else
        echo "cleanup: ${#others[@]} processes of other checkouts are left alone (--all --yes ends them)" >&2
    fi
}

wait_for_end() { # wait_for_end SECONDS ENTRY…
    local deadline=$((SECONDS + $1)) entry pid start
    shift
    for entry in "$@"; do
        read -r pid start _ <<<"$entry"
        while lives "$pid" "$start" && [ $SECONDS -lt "$deadline" ]; do sleep 0.2; done
    done
}

end_processes() { # end_processes KINDS SECONDS: asks them to end, and kills those that do not
    local entry pid start kind avd chosen=()
    for entry in ${own[@]+"${own[@]}"}; do
        read -r pid start kind avd <<<"$entry"
        if [[ " $1 " != *" $kind "* ]] || ! lives "$pid" "$start"; then continue; fi
        if $dry_run; then
            echo "would end $kind $pid of $avd"
            continue
        fi
        echo "ending $kind $pid of $avd"
        signal TERM "$pid" "$start"
        chosen+=("$entry")
    done
    [ ${#chosen[@]} -gt 0 ] || return 0
    wait_for_end "$2" "${chosen[@]}"
    for entry in "${chosen[@]}"; do
        read -r pid start _ <<<"$entry"
        signal KILL "$pid" "$start"
    done
    wait_for_end 5 "${chosen[@]}"
}

remove() { # remove PATH…
    local path
    for path in "$@"; do
        [ -e "$path" ] || continue
        if $dry_run; then
            echo "would remove $path"
        else
            echo "removing $path"
            rm -rf -- "$path"
        fi
    done
}

is_free() { # is_free FILE: is the lock on it free?
    [ ! -e "$1" ] || flock -n "$1" true
}

remove_clones() {
    local folder name path
    for folder in "${avd_home%/}"/*.avd; do
        name=$(basename "$folder" .avd)
        is_free "${avd_home%/}/.$name.owner" || continue
        if fits_pattern "$name" && [ -f "$folder/rollout_buffer_clone_of" ] && [ ! -L "$folder" ]; then
            remove "$folder" "${avd_home%/}/$name.ini" "${avd_home%/}/.$name.lock" "${avd_home%/}/.$name.owner"
        fi
    done
    for path in "${avd_home%/}"/.rollout_buffer_copy_[0-9]*.lock; do # places of copies under way
        if [ -f "$path" ] && is_free "$path"; then remove "$path"; fi
    done
}

remove_rest() {
    local path
    for path in "$temporary"/rollout_buffer_device_[0-9]*_* "$temporary"/rollout_buffer_android_world_[0-9]*_*; do
        if [ -d "$path" ] && [ -O "$path" ] && [ ! -L "$path" ] && is_free "$path/in_use"; then remove "$path"; fi
    done
    for path in "$locks"/*.lock; do
        # A held lock belongs to a running worker.
        if [ -f "$path" ] && is_free "$path"; then remove "$path"; fi
    done
}

remove_stale_records() { # of processes that have exited
    local record name
    for record in "$records"/*-*; do
        name=${record##*/}
        [[ $name =~ ^[0-9]+-[0-9]+$ ]] || continue
        if [ "$(value_of "$record" boot)" != "$boot" ] || ! lives "${name%-*}" "${name#*-}"; then remove "$record"; fi
    done
}

for kind in watchdog emulator adb_server; do find_recorded "$kind"; done
find_marked
include_others
end_processes watchdog $watchdog_patience
end_processes "emulator adb_server unrecorded" $patience
if $remove_avds; then remove_clones; fi
if $remove_all; then
    remove_rest
    remove_stale_records
fi
for entry in ${own[@]+"${own[@]}"}; do
    read -r pid start kind avd <<<"$entry"
    if ! $dry_run && lives "$pid" "$start"; then
        echo "cleanup: $kind $pid of $avd does not end" >&2
        exit 1
    fi
done
