"""OpenAI-compatible HTTP over the generation service. Needs the extra `http`: starlette, uvicorn, prometheus_client."""
