"""Pictures of timelines: content (`panel`), positions (`layout`), and one file for each format."""
