"""What crosses HTTP: requests and responses as pydantic models, in OpenAI's shapes."""
