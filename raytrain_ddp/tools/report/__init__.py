"""Reports what is known of one or several runs in one HTML file: `write.write_report`.

Does not use Ray; imports torch only to evaluate a checkpoint (predictions.py).
"""
