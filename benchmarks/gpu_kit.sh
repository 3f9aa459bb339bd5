#!/usr/bin/env bash
# Downloads wheels for a GPU machine that has Python 3.12 and torch, but no network and no Ray:
#   build/gpu-kit/wheels  what this package needs there:
#     pip install --no-index --no-deps --target site build/gpu-kit/wheels/*.whl; export PYTHONPATH=$PWD/site
#   build/gpu-kit/ray     Ray, for: python benchmarks/gpu.py --ray-wheels build/gpu-kit/ray
# Ray comes without its Java, RLlib and dashboard pages: 40 MB instead of 75.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kit=build/gpu-kit
rm -rf "$kit"

get() { # FOLDER REQUIREMENT ...
    local folder=$1 glibc platforms=()
    shift
    for glibc in 2_28 2_27 2_17; do
        platforms+=(--platform "manylinux_${glibc}_x86_64")
    done
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 \
        --platform manylinux1_x86_64 --dest "$kit/$folder" "$@"
}

get wheels simplejpeg tomli-w
get ray 'ray==2.60.*' jsonschema jsonschema-specifications referencing rpds-py tensorboardX \
    pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection
python3 - "$kit"/ray/ray-*.whl <<'END'
import os, sys, zipfile

source = sys.argv[1]
dropped = ("ray/jars/", "ray/rllib/", "ray/dashboard/client/")
with zipfile.ZipFile(source) as old, zipfile.ZipFile(source + ".part", "w") as new:
    for item in old.infolist():
        if not item.filename.startswith(dropped):
            new.writestr(item, old.read(item), zipfile.ZIP_DEFLATED, compresslevel=9)
os.replace(source + ".part", source)
END
du -sh "$kit"/*
