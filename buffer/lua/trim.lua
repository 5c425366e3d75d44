-- Forgets groups that are over. ARGV: how many of each state to keep, largest age in s (0: any), 1 to keep durable groups
-- until they were exported, most to forget at once (Redis serves nobody meanwhile). Returns how many.
local keep, age_s, until_exported, most = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
local time, forgotten = now(), 0
for _, state in ipairs({'durable', 'filtered', 'expired', 'reissued'}) do
  local surplus = redis.call('ZCARD', key(state)) - keep
  local ids = redis.call('ZRANGE', key(state), 0, most - 1, 'WITHSCORES')
  for i = 1, #ids, 2 do
    local id, over_at = ids[i], ids[i + 1]
    if state == 'durable' then over_at = about(id, 'durable_at') end
    local due = surplus > 0 or (age_s > 0 and time - tonumber(over_at) > age_s)
    if not due or (state == 'durable' and until_exported and not about(id, 'exported')) then break end
    forget(id, state)
    surplus = surplus - 1
    forgotten = forgotten + 1
  end
end
return forgotten
