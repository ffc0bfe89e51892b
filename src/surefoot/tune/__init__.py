"""Finding settings: variants trained side by side, searches, range tests, pictures of schedules. No module of a run imports this room."""
