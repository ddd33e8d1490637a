"""What each module's quantization costs, and which modules are worth their memory in high precision."""
