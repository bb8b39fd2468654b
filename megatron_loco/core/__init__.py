"""What LoCo is: pure functions in plain torch, and the byte layout of what travels."""
