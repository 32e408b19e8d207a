"""All gradients of a CUDA device measured in two launches, of which the first one reads each byte once.

`programs.py` has the two programs, in Triton. `tables.py` says which gradients they can read, and puts together what they get
of them; `launch.py` sends it and launches; `trial.py` compares what comes back with `device.py` before it is used; `choice.py`
decides, device by device, and is all that `eager.py` knows of this folder.
"""
