"""What a scraper reads."""

from prometheus_client.parser import text_string_to_metric_families


def samples(text):
    """``{name or name{label="value",...}: value}`` of an exposition."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found, f"{name} stands there twice"
            found[name] = sample.value
    return found


def gauges(text):
    """Samples of gauges alone, by the same names."""
    kinds = {family.name for family in text_string_to_metric_families(text) if family.type == "gauge"}
    return {name: value for name, value in samples(text).items() if name.split("{")[0] in kinds}
