"""OpenAI's routes of audio: transcriptions and translations."""
