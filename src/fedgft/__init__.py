"""Group fairness in federated learning."""
