"""Black box: writes what is needed to see a problem again, and reads it. What is written is kept by `inspection/black_box`."""
