"""The workspace: one dock with a tab for every panel."""
