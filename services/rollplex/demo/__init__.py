"""The demo's own data and model: videos of moving shapes, a small Qwen2.5-VL, and its supervised warm start."""
