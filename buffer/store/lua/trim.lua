-- Forgets groups that are over. ARGV: how many of each state to keep, largest age in s (0: any), 1 to keep durable groups
-- until they were exported, most to forget at once (Redis serves nobody meanwhile). Returns how many.
local keep, age_s, until_exported, most = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
local time, forgotten = now(), 0
for _, state in ipairs({'durable', 'filtered', 'expired', 'reissued'}) do
  local surplus = redis.call('ZCARD', key(state)) - keep
  local found = (surplus > 0 or age_s > 0) and redis.call('ZRANGE', key(state), 0, most - 1, 'WITHSCORES') or {}
  local ids, last = {}, nil
  for i = 1, #found, 2 do
    local id, score = found[i], found[i + 1]
    if surplus <= 0 then
      local over_at = state == 'durable' and about(id, 'durable_at') or score
      if age_s <= 0 or time - tonumber(over_at) <= age_s then break end
    end
    if state == 'durable' and until_exported and not about(id, 'exported') then break end
    if state == 'durable' then last = tonumber(score) end
    ids[#ids + 1] = id
    surplus = surplus - 1
  end
  forget(state, ids, last)
  forgotten = forgotten + #ids
end
return forgotten
