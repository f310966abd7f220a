"""HTTP in front of an orchestrator."""
