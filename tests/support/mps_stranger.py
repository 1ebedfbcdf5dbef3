"""A client of a mesh's MPS daemon that is no part of the mesh: it says `ready`, reads a line, and writes where nothing is mapped.
The fault takes every client of the daemon's server along. Started with CUDA_MPS_PIPE_DIRECTORY set."""

from __future__ import annotations

import sys

import torch

SOURCE = 'extern "C" __global__ void stray(float* p) { p[1LL << 40] = 1.0f; }'


def main() -> None:
    kernel, near = torch.cuda._compile_kernel(SOURCE, "stray"), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    # 4 TiB beyond an allocation.
    kernel(grid=(1, 1, 1), block=(1, 1, 1), args=(near,))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
