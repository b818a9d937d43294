"""Rewards: exact answers, functions of users in processes of their own, HTTP services, and weighted sums."""
