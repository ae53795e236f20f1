"""The way back: question, plan, segments, proof."""
