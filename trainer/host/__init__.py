"""What differs by machine: a rank's place, its arithmetic, and the sign of life it leaves on its disk."""
