"""Finding settings: pictures of schedules. No module of a run imports this room."""
