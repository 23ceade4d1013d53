"""What is judged before anything runs: plain integers, no torch, rules that are proved for all of them."""
