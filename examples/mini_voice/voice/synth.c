/*
 * Speak every line of standard input with a flite voice.
 *
 *   synth PREFIX [DURATION_STRETCH] < texts
 *
 * PREFIX.pcm: 16 kHz, 16 bit, mono, all utterances in a row.
 * PREFIX.txt: a line each: samples TAB text TAB phone:end_seconds:word ... (word is -1 in silence).
 */
#include <flite/flite.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_WORDS 256
#define MAX_LINE 4096
#define RATE 16000

cst_voice *register_cmu_us_slt(const char *voxdir);

static FILE *open_or_die(const char *prefix, const char *suffix, const char *mode) {
  char path[MAX_LINE];
  snprintf(path, sizeof path, "%s%s", prefix, suffix);
  FILE *file = fopen(path, mode);
  if (!file) {
    perror(path);
    exit(1);
  }
  return file;
}

/* The index, among the utterance's words, of the word that a segment belongs to; -1 if none. */
static int word_of(const cst_item *segment, cst_item *const *words, int count) {
  const cst_item *syllable_part = item_as(segment, "SylStructure");
  if (!syllable_part || !item_parent(syllable_part) || !item_parent(item_parent(syllable_part))) return -1;
  const cst_item *word = item_parent(item_parent(syllable_part));
  for (int i = 0; i < count; i++)
    if (item_equal(words[i], word)) return i;
  return -1;
}

static void write_phones(FILE *out, cst_utterance *utterance) {
  cst_item *words[MAX_WORDS];
  int count = 0;
  for (cst_item *w = relation_head(utt_relation(utterance, "Word")); w && count < MAX_WORDS; w = item_next(w)) words[count++] = w;
  for (cst_item *s = relation_head(utt_relation(utterance, "Segment")); s; s = item_next(s))
    fprintf(out, "%s:%.4f:%d ", item_feat_string(s, "name"), item_feat_float(s, "end"), word_of(s, words, count));
}

int main(int argc, char **argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s PREFIX [DURATION_STRETCH] < texts\n", argv[0]);
    return 2;
  }
  flite_init();
  cst_voice *voice = register_cmu_us_slt(NULL);
  if (argc > 2) feat_set_float(voice->features, "duration_stretch", atof(argv[2]));
  FILE *pcm = open_or_die(argv[1], ".pcm", "wb"), *index = open_or_die(argv[1], ".txt", "w");
  char line[MAX_LINE];
  while (fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\n")] = 0;
    cst_utterance *utterance = flite_synth_text(line, voice);
    cst_wave *wave = utt_wave(utterance);
    if (wave->sample_rate != RATE) cst_wave_resample(wave, RATE);
    fwrite(wave->samples, sizeof(short), wave->num_samples, pcm);
    fprintf(index, "%d\t%s\t", wave->num_samples, line);
    write_phones(index, utterance);
    fprintf(index, "\n");
    delete_utterance(utterance);
  }
  return fclose(pcm) || fclose(index);
}
