"""Pictures of timelines: what they show (`panel`), where it goes (`layout`), and one file for each form it takes."""
