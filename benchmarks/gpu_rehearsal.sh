#!/usr/bin/env bash
# Rehearses benchmarks/gpu.py for a machine with a GPU that has PyTorch's packages but not Ray's:
#
#     bash benchmarks/gpu_rehearsal.sh [ARGUMENT of gpu.py ...]
#
# It uses an environment with such versions (build/gpu-rehearsal; uv makes it once, with the Python 3.12
# on PATH or in ~/.pyenv), an emulated GPU, and --tiny. PYTHON=/path/to/python selects another Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
place=$PWD/build/gpu-rehearsal
lent=(
    torch==2.11.0 torchvision==0.26.0 numpy==2.5.2 torchmetrics==1.9.0 timm==1.0.31 pyarrow==26.0.1
    pandas==3.1.1 matplotlib==3.11.2 rich==15.0.0 pytest==9.2.0 safetensors==0.8.0 tensorboard pyyaml pip msgpack click requests psutil attrs filelock
)
carried=(simplejpeg==1.9.0 tomli-w==1.2.0 cloudpickle==3.1.2)

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=$place/venv/bin/python
    if [[ ! -e $place/installed ]]; then
        for found in "$(command -v python3.12)" ~/.pyenv/versions/3.12.*/bin/python; do
            "$found" -c '' 2>/dev/null && break
        done
        uv venv --quiet --clear --python "$found" "$place/venv"
        uv pip install --quiet --python "$PYTHON" "${lent[@]}" "${carried[@]}"
        touch "$place/installed"
    fi
fi
mkdir -p "$place/emulated"
environment=$(PYTHONPATH=tests/fakecuda:$PWD "$PYTHON" - "$place/emulated" <<'END'
import os, shlex, sys
from pathlib import Path
import building

folder = Path(sys.argv[1])
building.build(folder)
for name, value in building.environment(folder, install=True).items():
    if value != os.environ.get(name):
        print(f"export {name}={shlex.quote(value)}")
END
)
eval "$environment"
exec "$PYTHON" benchmarks/gpu.py --tiny --out "$place/gpu.md" "$@"
