"""Black box: writes what is needed to see a problem again, and reads it.

`recorder.py` decides when, `writing.py` writes a folder, `loading.py` is `load_black_box`. What is written is kept by
`inspection/black_box`.
"""
