"""What Inductor gets wrong of ranges of sizes."""
