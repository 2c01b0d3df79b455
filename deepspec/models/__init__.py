"""The frozen target, the drafters, and the decoding loop that joins them. Knows neither data, train nor eval."""
