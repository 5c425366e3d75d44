-- Removes the locations of groups whose bytes were read back from a spill file and stored before. args: ids.
for _, id in ipairs(args.ids) do
  remove_location(id)
  local state = state_of(id)
  if state ~= 'ready' and state ~= 'leased' then redis.call('DEL', key('group:' .. id)) end  -- forgotten meanwhile
end
