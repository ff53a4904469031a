"""What a lake holds, as its manifest has it: captures, attempts, whole sets of captures."""
