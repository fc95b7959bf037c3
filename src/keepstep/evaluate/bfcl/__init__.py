"""The Berkeley Function Calling Leaderboard (BFCL v4): its questions, verdicts of our own, scores, decontamination."""
