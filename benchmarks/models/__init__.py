"""How well an operator, an FNO and a U-Net of one budget predict: tasks, shifted data, several seeds."""
