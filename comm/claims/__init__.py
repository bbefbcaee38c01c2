"""What others say of such networks, as data: read, worked out, judged and explained."""
